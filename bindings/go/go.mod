module bifolio

go 1.19
